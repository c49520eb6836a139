-- What a pool keeps is as much as its workers and the requests on them: it works on without room for blocks.

local function register(name, callback)
  redis.register_function({ function_name = name, callback = callback, flags = { 'allow-oom' } })
end
