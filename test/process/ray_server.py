"""The server as a user starts it, for `process.fake.serving`: python ray_server.py serve IGNORED FLAGS..."""

import sys

from runtime import launch_server

if __name__ == "__main__":
    sys.exit(launch_server.main(sys.argv[3:]))
