"""`python -m holdfast`: how the supervisor starts its children, independently of the PATH."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
