"""``python -m graphsurgery``."""

from __future__ import annotations

from graphsurgery.cli import main

if __name__ == "__main__":
    main()
