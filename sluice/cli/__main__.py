"""`python -m sluice.cli`: the same as `sluice`."""

from sluice.cli.main import app

if __name__ == "__main__":
    app()
