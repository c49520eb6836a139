-- Registers functions. They must also run on a store that is full: without leases, nothing would be swept there, and it would
-- stay full.

local function register(name, callback)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, 8000, 1048576), flags = { 'allow-oom' },
  })
end
