"""Parts of the machine that a run takes: devices, threads, time, files, and a record of versions."""
