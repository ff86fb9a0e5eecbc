import sys

from nlr_lab.cli.main import main

sys.exit(main())
