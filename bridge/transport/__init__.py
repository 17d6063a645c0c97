"""How a bucket travels from a trainer rank to the vLLM workers. shm: one host, shared memory."""
