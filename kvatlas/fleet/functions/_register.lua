-- Leases and members are few and small: without memory for them nothing would be swept, and no room would ever come back.

local function register(name, callback)
  redis.register_function({ function_name = name, callback = callback, flags = { 'allow-oom' } })
end
