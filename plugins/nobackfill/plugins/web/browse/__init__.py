"""The gallery of this device in a browser: `edge-client browse`; needs the extra `web`."""
