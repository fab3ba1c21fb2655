"""Agent harnesses: the endpoint that they call, and the processes in which they run."""
