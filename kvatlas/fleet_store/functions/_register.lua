-- Registering functions. Leases and members are few and small. If their functions needed free memory, nothing would be swept on
-- a full store, and it would stay full.

local function register(name, callback)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, 8000, 1048576), flags = { 'allow-oom' },
  })
end
