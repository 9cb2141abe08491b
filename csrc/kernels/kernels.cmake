# placeholder: the kernels module is defined here
