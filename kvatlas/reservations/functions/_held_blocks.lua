-- Reads from the index what workers hold of a prompt, and only as much as a choice needs. The index's layout:
-- kvatlas/index/redis/functions/_slot.lua. Its keys are in a different slot from the pool's, so this works only in a standalone
-- store.
--
-- Residency is prefix-closed for active holders: there can only be fewer of them along a chain. Other holders in the same
-- values (retired ones that are being swept, loading ones) come and go.
--
-- chain: { hashes = packed, tokens = those that a hash stands for, blocks = key, values = those read, most = no active holder
-- that was not returned holds more blocks, met = the holders returned, met_count = how many these are }. Blocks count from 1.

local ACTIVE_HOLDER, HOLDER_BYTES, ENTRY_BYTES = 3, 3, 4 -- field of an index record, sizes of a number and of an entry
local FARTHEST_TIER, PROBED_TIERS = 4, 64 -- the last tier other than HBM, blocks between two looks at tiers

-- Calls a command that reads the index. Damage there does not concern the pool, which must not be dropped because of it.
local function read_index(...)
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err then
    error({ err = 'INDEX ' .. found.err })
  end
  return found
end

local function hash_at(chain, i)
  return string.sub(chain.hashes, i * HASH_BYTES - 7, i * HASH_BYTES)
end

-- Returns the holders value of a block; '' if it has none.
local function value_at(chain, i)
  local value = chain.values[i]
  if not value then
    value = read_index('HGET', chain.blocks, hash_at(chain, i)) or ''
    chain.values[i] = value
  end
  return value
end

local function open_chain(blocks, tokens, hashes)
  local chain = { hashes = hashes, tokens = tokens, blocks = blocks, values = {}, met = {}, met_count = 0 }
  local low, high = 0, #hashes / HASH_BYTES -- block `low` has a holder, and the one after `high` has none
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if read_index('HEXISTS', blocks, hash_at(chain, middle)) == 1 then
      low = middle
    else
      high = middle - 1
    end
  end
  chain.most = low
  return chain
end

-- Returns the holders of a value that have not been returned before.
local function new_holders(chain, value)
  local found = {}
  for first = 1, #value - HOLDER_BYTES, ENTRY_BYTES do
    local holder = string.sub(value, first, first + HOLDER_BYTES - 1)
    if not chain.met[holder] then
      found[#found + 1] = holder
    end
  end
  return found
end

-- Returns all holders of at least this many blocks that have not been returned before; nil if there are more than `most`.
local function next_holders(chain, blocks, most)
  local value = value_at(chain, blocks)
  if #value / ENTRY_BYTES - chain.met_count > most then
    return nil
  end
  local found = new_holders(chain, value)
  if #found > most then
    return nil
  end
  for _, holder in ipairs(found) do
    chain.met[holder] = true
  end
  chain.met_count = chain.met_count + #found
  return found
end

-- Returns the active holder of each worker; false if it has none.
local function holders_of(lookup, workers)
  local holders = {}
  for i, packed in ipairs(workers[1] and read_index('HMGET', lookup.workers, unpack(workers)) or {}) do
    local done, record = pcall(cmsgpack.unpack, packed or '')
    local holder = done and type(record) == 'table' and record[ACTIVE_HOLDER]
    holders[i] = type(holder) == 'string' and #holder == HOLDER_BYTES and holder
  end
  return holders
end

-- Returns the position of a holder's entry among those of a block; nil if the holder does not have the block.
local function entry_in(value, holder)
  local at = string.find(value, holder, 1, true)
  while at and at % ENTRY_BYTES ~= 1 do
    at = string.find(value, holder, at + 1, true)
  end
  return at
end

-- Returns how many blocks a holder that was not returned has (false: none); nil if it has fewer than `least`.
local function depth_of(chain, holder, least)
  local low, high = least, chain.most
  if not holder or low > high or high == 0 or (low > 0 and not entry_in(value_at(chain, low), holder)) then
    return low == 0 and 0 or nil
  end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if entry_in(value_at(chain, middle), holder) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

-- Returns true if all of the first `depth` blocks are in a worker's HBM, as far as kvatlas/index/gallop.py would see that.
local function is_in_hbm(lookup, chain, worker, depth)
  local holder = depth > 0 and holders_of(lookup, { worker })[1]
  if not holder then
    return true
  end
  local fields, elsewhere = {}, false
  for tier = 1, FARTHEST_TIER do
    fields[tier] = holder .. lookup.scope_id .. string.char(tier)
  end
  for _, blocks in ipairs(read_index('HMGET', lookup.held, unpack(fields))) do
    elsewhere = elsewhere or blocks
  end
  local i = 1
  while elsewhere and i <= depth do
    local value = value_at(chain, i)
    local at = entry_in(value, holder)
    if at and string.byte(value, at + HOLDER_BYTES) % 2 == 0 then
      return false
    end
    i = (i < depth and i + PROBED_TIERS > depth) and depth or i + PROBED_TIERS
  end
  return true
end
