"""What a run needs of this machine: memory and processors, files, and folders in an object store."""
