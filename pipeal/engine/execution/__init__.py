"""Who carries a schedule out: the caller, or one thread per stage; their channels and watchdog."""
