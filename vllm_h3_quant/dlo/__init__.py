"""Where finished layers live: host memory, what is copied from there to the device and when, and what is refused."""
