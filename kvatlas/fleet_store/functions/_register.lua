-- Registers functions. They also run on a full store: without leases, nothing would be swept there, and it would stay
-- full.

local function register(name, callback)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, 8000, 1048576), flags = { 'allow-oom' },
  })
end
