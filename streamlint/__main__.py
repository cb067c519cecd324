"""`python -m streamlint` is the `streamlint` command."""

from streamlint.cli import run

if __name__ == "__main__":
    run()
