"""`python -m sluice_cli`: the same as `sluice`."""

from sluice_cli.main import app

if __name__ == "__main__":
    app()
