-- Registering functions. Their names end with the library's tag (kvatlas/store/function_library.py).

-- Registers a function that may need memory: a store that is out of memory refuses to run it.
local function register(name, callback)
  redis.register_function(name .. TAG, callback)
end

-- Registers a function that also runs on a store that is out of memory: it needs next to none, or frees some.
local function register_always(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'allow-oom' } })
end

local function register_read_only(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'no-writes' } })
end
