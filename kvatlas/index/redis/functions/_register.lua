-- Registers functions. Their names end with the library's tag (kvatlas/store/function_library.py), and the arguments
-- of a call are bounded (`bounded` there).

-- Registers a function that may need memory: a store that is out of memory refuses to run it.
local function register(name, callback, most_args, most_bytes)
  redis.register_function(name .. TAG, bounded(callback, most_args, most_bytes))
end

-- Registers a function that also runs on a store that is out of memory, because it needs next to no memory, or frees some.
local function register_always(name, callback, most_args, most_bytes)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, most_args, most_bytes), flags = { 'allow-oom' },
  })
end

local function register_read_only(name, callback, most_args, most_bytes)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, most_args, most_bytes), flags = { 'no-writes' },
  })
end
