"""`python -m transformer_engine` is the `te` command."""

from .cli import main

if __name__ == "__main__":
    main()
