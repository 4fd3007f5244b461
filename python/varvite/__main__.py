"""`python -m varvite`: the command line."""

from varvite.cli import main

if __name__ == "__main__":
    main()
