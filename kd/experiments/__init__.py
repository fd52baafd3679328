"""Short experiments on a job, each shown as one page: ablations and loss landscapes."""
