"""What the planner's subcommands do; ``cli.py`` loads the one that is named.

Exit codes: 0 for an answer, 2 for input that is refused (with one line on standard error), 3 for a job that cannot be
done (with the reason and what comes nearest), 130 after Ctrl-C.
"""
