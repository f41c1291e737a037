"""`python -m transformer_engine` is the `te` command."""

from transformer_engine_tools import main

if __name__ == "__main__":
    main()
