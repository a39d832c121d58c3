"""Run a server of the S3 protocol until standard input ends; prints its port. Runs in the environment OBJECT_STORE."""

import sys

from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
