"""`python -m kvsnap`."""

from kvsnap.cli.main import main

main()
