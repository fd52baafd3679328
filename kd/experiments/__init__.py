"""Short experiments on a job, each shown as one page: ablations, loss landscapes, noise."""
