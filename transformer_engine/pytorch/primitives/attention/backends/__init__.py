"""The libraries and kernels that compute attention, one file each; `choose.TABLE` orders them."""
