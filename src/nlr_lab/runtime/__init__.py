"""What a run takes of its machine: devices, threads, time, files, and a record of versions."""
