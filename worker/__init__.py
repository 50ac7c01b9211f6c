"""The worker: one process, one model. Main thread waits, io thread has the socket, executor thread has MLX.

Importing this package imports neither MLX nor zmq.
"""
