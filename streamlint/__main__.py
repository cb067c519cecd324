"""`python -m streamlint` is the `streamlint` command."""

from streamlint.cli import main

if __name__ == "__main__":
    main()
