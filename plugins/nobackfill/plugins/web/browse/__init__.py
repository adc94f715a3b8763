"""The pages of a gallery on this device (`edge-client browse`); needs the extra `web`."""
