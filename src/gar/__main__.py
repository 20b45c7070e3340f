"""``python -m gar``, as launchers of several processes need it."""

from gar.cli import main

if __name__ == "__main__":
    main()
