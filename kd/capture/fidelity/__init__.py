"""Compare the records of a cache with the live teacher."""
