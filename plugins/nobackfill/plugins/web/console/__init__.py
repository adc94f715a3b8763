"""Pages for operators (`gateway serve --console`); needs the extra `web`.

The console calls the gateway as any client does, with the rights of the person who looks."""
