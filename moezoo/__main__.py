"""`python -m moezoo`: the console command."""

from moezoo.cli import main

if __name__ == "__main__":
    main()
