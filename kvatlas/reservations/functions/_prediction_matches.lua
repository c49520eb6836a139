-- Finds those predictions (prefixes that workers are about to hold) that a chain begins with.

local LONG = 4096 -- a prediction counts once more for every LONG bytes of its hashes

local READ_AT_ONCE = 16 -- predictions

local function are_equal_at(chain, offset, hashes, step)
  local last = step * HASH_BYTES
  return string.sub(chain, offset + last - 7, offset + last) == string.sub(hashes, last - 7, last)
end

-- Returns how many leading steps two packed chains share: if two hashes are equal, so are all before them. `guess`: as many
-- may be.
local function shared(chain, offset, hashes, guess)
  local low, high = 1, math.min(#chain - offset, #hashes) / HASH_BYTES
  for step = guess, guess + 1 do
    if low < step and step <= high then
      if are_equal_at(chain, offset, hashes, step) then
        low = step
      else
        high = step - 1
      end
    end
  end
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if are_equal_at(chain, offset, hashes, middle) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

-- Returns the ids of up to `most` predictions that begin with one of a chain's steps, and the numbers of these steps.
local function ids_along(keys, chain, most)
  local ids, firsts, chain_steps = {}, {}, #chain / HASH_BYTES
  for first = 0, chain_steps - 1, CHUNK do
    local probed = math.min(CHUNK, chain_steps - first)
    local probes = { struct.unpack(string.rep('c' .. HASH_BYTES, probed), chain, first * HASH_BYTES + 1) }
    local found = redis.call('HMGET', keys[ANCHORS], unpack(probes, 1, probed)) -- followed by the next position
    for i = 1, probed do
      local packed = found[i] or ''
      if #packed > MOST_ANCHORED * ID_BYTES then
        damaged('anchor')
      end
      for at = 1, math.min(#packed, (most - #ids) * ID_BYTES), ID_BYTES do
        ids[#ids + 1], firsts[#firsts + 1] = string.sub(packed, at, at + ID_BYTES - 1), first + i - 1
      end
    end
  end
  return ids, firsts
end

-- Returns the predictions that share a prefix with a chain, as a list of { id, prediction, steps = leading steps of the
-- chain that it covers, whole = is all of the prediction shared? }; and how many of `left` it may still read.
local function matches_of(keys, chain, now, left)
  local matches, before = {}, 0
  local ids, firsts = ids_along(keys, chain, left)
  for next_id = 1, #ids, READ_AT_ONCE do
    if left <= 0 then
      break
    end
    local last = math.min(next_id + READ_AT_ONCE - 1, #ids)
    for i, packed in ipairs(redis.call('HMGET', keys[PREDICTIONS], unpack(ids, next_id, last))) do
      local id, first_step = ids[next_id + i - 1], firsts[next_id + i - 1]
      local prediction = packed and unpack_prediction(packed)
      if not prediction then
        damaged('anchor')
      end
      local hashes = prediction[P_HASHES]
      left = left - 1 - math.floor(#hashes / LONG)
      if prediction[P_ENDS_US] > now and prediction[P_FIRST_STEP] == first_step then
        local steps = shared(chain, first_step * HASH_BYTES, hashes, before - first_step)
        before = first_step + steps
        matches[#matches + 1] = { id = id, prediction = prediction, steps = before, whole = steps * HASH_BYTES == #hashes }
      end
    end
  end
  return matches, math.max(0, left)
end
