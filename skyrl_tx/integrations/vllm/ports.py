"""A port for a server that is started later."""

import socket


def reserve_port(ip: str) -> socket.socket:
    """Return a socket with a free port, which no other program gets as long as it is open.

    On Linux a server that reuses addresses, as vLLM does, may listen at the port all the same. Close it elsewhere.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((ip, 0))
    return reserved
