-- Registers functions. A pool's data is only as large as its workers and their requests, so its functions also run when the
-- store has no memory left for blocks.
--
-- A record that was damaged by hand must not make a function fail forever: if one finds damage, or a key of another
-- type, the pool is repaired and the function runs once more.

-- Returns the damage that an error reports; nil if the error is about something else.
local function damage_of(error)
  local text = type(error) == 'table' and error.err or tostring(error)
  return string.match(text, '^%-?DAMAGED (.*)') or string.match(text, '^%-?(WRONGTYPE.*)')
    or string.match(text, '^%-?ERR (hash value is not.*)')
end

local function register(name, callback, most_args, most_bytes)
  local function run(keys, args)
    local done, answer = pcall(callback, keys, args)
    if done then
      return answer
    end
    local damage = damage_of(answer)
    if not damage then
      error(answer, 0)
    end
    repair(keys, damage)
    return callback(keys, args)
  end
  redis.register_function({
    function_name = name .. TAG, callback = bounded(run, most_args, most_bytes), flags = { 'allow-oom' },
  })
end

local function register_read_only(name, callback, most_args, most_bytes)
  redis.register_function({
    function_name = name .. TAG, callback = bounded(callback, most_args, most_bytes), flags = { 'no-writes' },
  })
end
