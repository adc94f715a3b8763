"""What the demo says when it cannot go on; exit codes as everywhere (docs/architecture.md)."""


class DemoError(Exception):
    """A step that failed, with the sentence for the person who started the demo."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
