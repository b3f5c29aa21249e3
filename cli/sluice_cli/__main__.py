"""`python -m sluice_cli`: the same as `sluice`."""

from sluice_cli.entry import main

if __name__ == "__main__":
    main()
