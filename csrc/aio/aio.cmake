# placeholder: the aio module is defined here
