"""``python -m sparkforge``: what build.py hands over to."""

from sparkforge.cli.main import main

raise SystemExit(main())
