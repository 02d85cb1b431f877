"""`python -m ace_moe` is the command `ace`."""

from .cli import main

main()
