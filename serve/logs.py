"""One log record a line, whatever it holds: what a client sends cannot forge a second record."""

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OneLine(logging.Formatter):
    """Writes line breaks, those of tracebacks too, as " | "."""

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())


def configure_logging(level: str) -> None:
    """Log to standard error, from this level up; uvicorn only what is wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
