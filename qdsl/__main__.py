"""`python -m qdsl`."""

from qdsl.cli import main

main()
