"""The console: pages for people about runs, samples, checkpoints, sessions, keys and the server.

Pages are HTML from the server. Without JavaScript tables and forms work; with it they are live and have charts.
"""
