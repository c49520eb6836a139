-- Names of functions end with the library's tag (kvatlas/store/function_library.py).

-- A function that may need memory: a store without any refuses it.
local function register(name, callback)
  redis.register_function(name .. TAG, callback)
end

-- A function that also runs on a store without memory: it takes none to speak of, or gives some back.
local function register_always(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'allow-oom' } })
end

local function register_read_only(name, callback)
  redis.register_function({ function_name = name .. TAG, callback = callback, flags = { 'no-writes' } })
end
