"""The copy of the current directory to every host: by rsync over ssh, or over the channels of the job's agents."""
