-- A pool's data is only as large as its workers and their requests, so its functions also run when the store has no memory for
-- blocks.

local function register(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'allow-oom' } })
end

local function register_read_only(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'no-writes' } })
end
