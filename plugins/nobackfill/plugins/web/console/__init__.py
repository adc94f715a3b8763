"""Pages for operators (`gateway serve --console`): a client of the gateway's own calls, with the
rights of whoever looks; needs the extra `web`."""
