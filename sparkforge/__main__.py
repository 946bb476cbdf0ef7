"""``python -m sparkforge``: what build.py hands over to."""

from sparkforge.cli import main

raise SystemExit(main())
